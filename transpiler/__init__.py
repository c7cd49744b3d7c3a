"""From one program to one program per role. Reading order: `api`, `job`, `passes`, `layout`, `rules`, `assemble`."""
