"""`python -m gguf_flash` is the command `gguf-flash`."""

from gguf_flash.cli import main

if __name__ == "__main__":
    main(prog_name="gguf-flash")
