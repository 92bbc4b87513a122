"""Manifests that run a recipe on Cloud TPU slices, through Pathways on Google Kubernetes Engine."""
