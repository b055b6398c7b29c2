"""What `make bench` measures: one module per subject, each with a `measure(lab, scale)` that returns table rows."""
