# A node of a run on GPUs: trainer, vLLM, and SGLang in a virtualenv of its own. CUDA libraries come with the Python packages.
FROM python:3.11-bookworm

WORKDIR /async_rl
COPY Makefile pyproject.toml setup.py README.md ./
COPY requirements requirements
COPY message_queue message_queue
COPY agent_loop agent_loop
COPY async_rl async_rl
COPY configs configs
COPY recipes recipes
RUN make setup setup-sglang GPU=1 PIP_NO_CACHE_DIR=1

ENV PATH=/async_rl/.venv/bin:$PATH PYTHONPATH=/async_rl
CMD ["python", "-m", "async_rl.run", "--help"]
