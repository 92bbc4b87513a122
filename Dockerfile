# The controller of a run on Cloud TPU: `elastix run RECIPE --backend pathways` (docs/cloud-tpu.md).
#
# Pathways' servers and this image must hold the same JAX. By default it is the one pinned in
# constraints.txt; another: docker build --build-arg JAX_VERSION=0.10.2 .
FROM python:3.12-slim

ARG JAX_VERSION=""
WORKDIR /elastix

COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY elastix elastix
RUN if [ -n "$JAX_VERSION" ]; then sed -i -E '/^jax(lib)?==/d' constraints.txt; fi \
    && pip install --no-cache-dir -c constraints.txt ".[pathways,text]" \
       ${JAX_VERSION:+"jax==$JAX_VERSION" "jaxlib==$JAX_VERSION"}

# Recipes are found here by the paths that `elastix launch gke` was given.
COPY models models
COPY recipes recipes

# What a crash leaves unwritten is lost with the pod.
ENV PYTHONUNBUFFERED=1
CMD ["elastix", "--help"]
