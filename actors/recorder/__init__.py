"""Takes the trainer's place in a run that only records samples."""
