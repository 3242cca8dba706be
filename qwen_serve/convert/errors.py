"""The one exception that `qwen-convert` prints instead of a traceback."""


class ConvertError(Exception):
    """A problem that the user can fix: the message says what is wrong and what would be right."""


class CheckpointError(ConvertError):
    """The checkpoint cannot be converted: a file or tensor is missing, damaged or of another architecture."""
