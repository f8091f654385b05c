"""Checkpoint files of Hugging Face directories: checked reading by slices, atomic sharded writing."""
