"""Commands that analyze the model of a bundle in this process."""
