# For CPUs:         docker build -t jaxrl-dist .
# For NVIDIA GPUs:  docker build -t jaxrl-dist --build-arg EXTRAS=cuda12,envpool .
# To train:         docker run --rm -v "$PWD:/work" jaxrl-dist train ppo --env CartPole-v1     (on a GPU: --gpus all)
FROM python:3.12-slim
ARG EXTRAS=
WORKDIR /opt/jaxrl-dist
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY jaxrl_dist jaxrl_dist
RUN pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"
WORKDIR /work
ENTRYPOINT ["jaxrl-dist"]
CMD ["doctor"]
