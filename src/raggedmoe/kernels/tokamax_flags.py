"""What must be said to absl before tokamax is called."""


def leave_command_line_alone() -> None:
    """Keep tokamax from reading this program's words as its own flags, which it does where nobody has read any."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
