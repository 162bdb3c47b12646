"""Masks understood: from the graph that builds one to what it lets every query see."""
