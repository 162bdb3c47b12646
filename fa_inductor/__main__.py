from .cli import main

main(prog_name="fa-inductor")
