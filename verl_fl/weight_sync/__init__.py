"""How do new weights reach the rollout? For now one plain engine, ``gloo``; the fast ones come with their own room."""
