ARG BASE
FROM ${BASE}
COPY faulty /opt/faulty/faulty
ENV PYTHONPATH=/opt/faulty
