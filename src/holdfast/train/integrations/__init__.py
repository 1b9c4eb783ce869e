"""Callbacks for the Trainers of Lightning and transformers."""
