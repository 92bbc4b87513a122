"""What `elastix bench` measures: one module for each kind of measurement, each run in a process of
its own, and the arithmetic that makes figures of what they found."""
