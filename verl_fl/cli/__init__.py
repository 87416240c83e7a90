"""The command ``verl-fl``. Importing it loads nothing heavy; each command imports what it needs when it runs."""
