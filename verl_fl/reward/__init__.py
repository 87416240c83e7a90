"""The user's reward function, run where it can neither stop nor end the trainer."""
