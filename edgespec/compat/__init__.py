"""What users of other tools write, in our words: flags, programs and keys of files."""
