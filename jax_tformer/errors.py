"""The one exception that means "the user can mend this"."""


class InputError(ValueError):
    """Bad input: its message is one line that says what was wrong, what was expected and what to do.

    The command-line programs print it without a traceback and exit with status 2.
    """


class FieldError(InputError):
    """Bad value of one field of a config: its name, and then what is wrong, so that a program can name its flag."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field, self.problem = field, problem


class TrainingFailed(RuntimeError):
    """The loss is no longer a number. Printed as one line too; the exit status is 1."""
