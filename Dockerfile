# An image that trains, for TPUs or GPUs:
#
#   docker build --platform=linux/amd64 --build-arg=ACCELERATOR=tpu --tag=IMAGE .
#
# ACCELERATOR is an extra of pyproject.toml, tpu or cuda; EXTRA may be another, such as wandb.
# docs/pods.md has the commands of a run.
FROM python:3.12-slim

ARG ACCELERATOR=tpu
ARG EXTRA=
WORKDIR /dapo_jax
ENV UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never

# Before the code, so that a change to it does not install everything again.
COPY pyproject.toml ./
RUN python3 -m venv .uv \
    && .uv/bin/pip install -q --no-cache-dir uv \
    && .uv/bin/uv sync -q --no-dev --extra gcs --extra "$ACCELERATOR" ${EXTRA:+--extra "$EXTRA"}
COPY . .

ENV PATH=/dapo_jax/.venv/bin:$PATH
ENTRYPOINT ["launch/restart.sh", "--", "python", "launch/train.py"]
