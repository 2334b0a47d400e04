"""The error that users see as one line."""


class UserError(Exception):
    """Something that the user can fix, in one sentence that names the flag and what was found.
    `args.launch` prints it and exits with code 2."""
