"""What the operating system says of processes: who they are, how they start and end, what they leave."""
