"""The exit codes of the command line; those of errors stand in `edgespec.errors`.

Imports nothing, so that the first moment of a process can use it.
"""

FAILED = 1  # an answer is not lossless, or is below a threshold
SOME_FAILED = 5  # of several requests
INTERRUPTED = 130  # 128 + SIGINT, as of a shell
BROKEN_PIPE = 141  # 128 + SIGPIPE
