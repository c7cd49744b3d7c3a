"""From a torch module and its loss to a program: traced (`model`, `tracing`), or as one op (`eager_program`)."""
