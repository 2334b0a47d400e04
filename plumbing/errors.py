"""The error that users see as one line."""


class UserError(Exception):
    """Something the user can fix: one sentence with the flag and what was found.
    `args.launch` prints it and exits with code 2."""
