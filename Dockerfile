# docker build -t flatout . && docker run --rm --gpus all -v "$PWD":/workspace flatout demo
# A smaller image without CUDA: docker build --build-arg TORCH_INDEX=URL, with the URL of an index that has CPU builds of torch.
FROM python:3.13-slim

ARG TORCH_INDEX=""

# torch.compile builds C++ (on a GPU: C, for Triton's launcher).
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /build
COPY constraints.txt ./
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt setuptools torch
COPY pyproject.toml README.md LICENSE ./
COPY flatout ./flatout
RUN pip install --no-cache-dir --no-build-isolation -c constraints.txt ".[report]" && rm -rf /build/*

RUN useradd --create-home --uid 1000 flatout && mkdir /workspace && chown flatout /workspace
USER flatout
WORKDIR /workspace
ENTRYPOINT ["flatout"]
CMD ["--help"]
