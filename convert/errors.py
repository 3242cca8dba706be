"""The one exception that `qwen-convert` prints instead of a traceback."""


class ConvertError(Exception):
    """A problem the user can mend: the message names what is wrong and what would be right."""


class CheckpointError(ConvertError):
    """The checkpoint cannot be converted: a file or tensor is missing, damaged or of another architecture."""
