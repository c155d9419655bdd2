# kleash on CPUs: docker build -t kleash . && docker run --rm -v "$PWD:/data" kleash measure --policy tuned/ --reference base/ --prompts prompts.jsonl --out drift/
FROM python:3.11-slim
COPY . /opt/kleash
RUN pip install --no-cache-dir --constraint /opt/kleash/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu '/opt/kleash[models]'
WORKDIR /data
ENTRYPOINT ["kleash"]
CMD ["measure"]
