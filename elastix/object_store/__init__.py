"""A run directory in a bucket of Google Cloud Storage, which one process at a time writes.

Objects can be neither appended nor renamed. So what a run writes it writes in a local folder first,
exactly as it would without a bucket, and puts it there whole: a checkpoint with its marker last,
rows before the marker. All requests go through TensorStore, which Orbax brings with it.
"""
