"""Processes as the operating system has them: who they are, how they start and end, what they leave."""
