"""Makes a program of a torch module and its loss: traced (`model`, `tracing`), or as one op (`eager_program`)."""
