"""A coordinator that gives out tasks (`transpile(dispatch="coordinator")`)."""
