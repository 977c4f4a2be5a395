"""`edgespec chat`: a conversation in the terminal.

`command` has the flags, `loop` the turns, `slashes` the commands behind a slash, `settings` what
/set changes, `reader` where lines come from, `screen` what a terminal may be shown.
"""
