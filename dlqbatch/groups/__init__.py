"""Groups of equal failures as an inbox: what each of them is doing, and what people decided about it."""
