"""For workers of other frameworks: a failure is handed over with its error; import the module of your framework."""
