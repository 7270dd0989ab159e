# Built on the builder's architecture: Go cross-compiles without emulation.
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src

# Modules change less often than the code, so they have their own layer.
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download

COPY . .
ARG TARGETOS TARGETARCH
ARG VERSION=dev
RUN --mount=type=cache,target=/go/pkg/mod \
    --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -buildvcs=false \
      -ldflags "-s -w -X stampede/internal/telemetry.version=$VERSION" \
      -o /stampede ./cmd/stampede

FROM scratch
# For a STAMPEDE_JWKS_URL, and for Redis and Postgres over TLS.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /stampede /stampede
# A number: Kubernetes can verify that it is not root, and scratch has no user names.
USER 65532:65532
EXPOSE 8080 9090
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["/stampede", "healthcheck"]
ENTRYPOINT ["/stampede"]
CMD ["serve"]

# What the image is. They change with each build, so they come last.
ARG VERSION=dev
ARG REVISION=unknown
ARG CREATED
ARG SOURCE
LABEL org.opencontainers.image.title="stampede" \
      org.opencontainers.image.description="Sells a limited stock to a crowd" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.created="$CREATED" \
      org.opencontainers.image.source="$SOURCE"
