"""`python -m dpo_pack` is `dpopack`."""

from dpo_pack.commands.main import main

if __name__ == "__main__":
    main()
