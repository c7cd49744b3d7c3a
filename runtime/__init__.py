"""Running programs: lowering, executors, roles, and what connects them."""
