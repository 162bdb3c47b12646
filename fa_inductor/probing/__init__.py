"""The graph-capture probe: is a captured attention launched, written, finite and right?"""
