#!/usr/bin/env bash
# Makes etcd, kube-apiserver, kube-controller-manager and kube-scheduler for the tests, once, from
# Debian's packages: the sources of Kubernetes 1.20.2 are the newest servers that Debian has.
#
# KUBEBUILDER_ASSETS, where set, names a folder that has them already. Nothing is installed, and
# neither apt's sources nor its lists are changed; it needs no root. It may be killed and run twice
# at once. The first time takes about two minutes of two cores and 1.5 GB of disk for as long.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/elastane-kubernetes
programs=(etcd kube-apiserver kube-controller-manager kube-scheduler)

fail() {
    echo "no control plane for the tests: $1" >&2
    echo "  next: ${2:-set KUBEBUILDER_ASSETS to a folder with ${programs[*]}}" >&2
    exit 1
}

missing() { # FOLDER
    local name
    for name in "${programs[@]}"; do [ -x "$1/$name" ] || echo "$name"; done
}

if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
    lacks=$(missing "$KUBEBUILDER_ASSETS" | tr '\n' ' ')
    [ -z "$lacks" ] || fail "KUBEBUILDER_ASSETS=$KUBEBUILDER_ASSETS has no $lacks"
    exit 0
fi

# Programs that other scripts than these made are made again.
bin=$cache/bin
sources=$(cat "$here/build.sh" "$here/prune.py" "$here/programs/kube_bed.go" | sha256sum)
is_made() { [ -z "$(missing "$bin")" ] && [ "$(cat "$bin/.made-by" 2>/dev/null)" = "$sources" ]; }
is_made && exit 0
mkdir -p "$bin"
exec 9>"$cache/lock"
flock -w 3600 9 || fail "another build has held $cache/lock for an hour" "end it, and run this again"
is_made && exit 0

command -v apt-get >/dev/null || fail "apt-get is not here: the sources come from Debian"
[ "$(dpkg --print-architecture)" = amd64 ] || fail "built and tried for amd64 only"
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/$') ||
    fail "apt's sources name no mirror of Debian" "add one, or set KUBEBUILDER_ASSETS"

# What an earlier run left that was killed goes first, and what this one makes goes at its end.
work=$cache/build
rm -rf "$work"
log=$work/log
trap '[ $? -eq 0 ] || tail -n 20 "$log" >&2 || true; rm -rf "$work"' EXIT
mkdir -p "$work"/{apt/lists/partial,apt/cache/archives/partial,debs,out,gopath/src/k8s.io}

# apt with one source, lists and cache of its own.
echo "deb $mirror bookworm main
deb-src $mirror bookworm main" >"$work/apt/sources.list"
own_apt() {
    apt-get -q -o Dir::Etc::sourcelist="$work/apt/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$work/apt/lists" -o Dir::Cache="$work/apt/cache" \
        -o APT::Sandbox::User= -o Acquire::Retries=3 -o Acquire::Languages=none "$@"
}
unpacked() { # PACKAGE, which is unpacked into $work/PACKAGE
    (cd "$work/debs" && own_apt download "$1" >/dev/null && dpkg-deb -x "$1"_*.deb "$work/$1")
}
fetch() {
    own_apt update >"$log" 2>&1 &&
        (cd "$work" && own_apt source --download-only kubernetes >>"$log" 2>&1) &&
        unpacked golang-github-modern-go-reflect2-dev 2>>"$log" &&
        unpacked etcd-server 2>>"$log"
}
fetch || fail "Debian's packages cannot be had from $mirror"
install -m 755 "$work/etcd-server/usr/bin/etcd" "$bin/.etcd"
mv "$bin/.etcd" "$bin/etcd"

go=$(command -v go || true)
if [ -z "$go" ] || ! "$go" version | grep -q 'go1\.19'; then
    for part in golang-1.19-go golang-1.19-src; do unpacked "$part" 2>>"$log"; done
    cp -r "$work/golang-1.19-src/usr/." "$work/golang-1.19-go/usr"
    go=$work/golang-1.19-go/usr/lib/go-1.19/bin/go
fi
GOROOT=$("$go" env GOROOT)

src=$work/gopath/src/k8s.io/kubernetes
mkdir "$src"
tar -xf "$work"/kubernetes_*.orig.tar.gz -C "$src" --strip-components 1
# reflect2 1.0.1 in there reads maps wrongly from Go 1.18 on: the server would panic at the first
# custom resource. Debian has the mended version.
reflect=$src/vendor/github.com/modern-go/reflect2
rm -f "$reflect"/*.go "$reflect"/*.s
cp "$work"/golang-github-modern-go-reflect2-dev/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$reflect"
rm -f "$reflect"/*_test.go
mkdir "$src/cmd/kube-bed"
cp "$here/programs/kube_bed.go" "$src/cmd/kube-bed/main.go"

python3 "$here/prune.py" "$src"

# Without modules: Go 1.19 refuses the module graph of 1.20. Cgo on and paths as they are: so Go
# takes its standard library as Debian compiled it, which needs no C compiler. Without optimisation,
# inlining, debug information and the clouds' providers, which the tests do not notice. All of this
# takes 146 s of processor time on a busy machine, where it took 214 s with the whole sources and a
# standard library of its own.
export GOCACHE=$work/gocache GOPATH=$work/gopath GOFLAGS= GOPROXY=off CGO_ENABLED=1 GO111MODULE=off
# Fewer collections of garbage in the compiler save a quarter of its processor time.
export GOROOT GOGC=400
plain="-dwarf=false -N -l"
build() { # OUTPUT PACKAGE [FLAG...]
    nice -n 19 "$go" build -tags providerless "-gcflags=k8s.io/kubernetes/...=$plain" \
        "-gcflags=k8s.io/kubernetes/vendor/...=$plain" "${@:3}" -o "$1" "$2"
}
cd "$src"
# The one file that the sources lack, which is made of comments in them.
build "$work/out/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
tagged() { # FOLDER...: those that have types for it
    LC_ALL=C grep -rlF --include='*.go' '+k8s:openapi-gen=' "$@" | grep -vE '_test\.go|/testdata/|generated' |
        xargs -n 1 dirname
}
inputs=$({
    tagged pkg cmd plugin
    (cd staging/src && tagged k8s.io/*) | grep -vE '^k8s\.io/(code-generator|sample-apiserver)' |
        sed 's#^#vendor/#'
} | LC_ALL=C sort -u | sed 's#^#k8s.io/kubernetes/#' | paste -sd,)
nice -n 19 "$work/out/openapi-gen" --logtostderr -i "$inputs" -O zz_generated.openapi \
    -p k8s.io/kubernetes/pkg/generated/openapi -r "$work/out/violations.report" \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt 2>>"$log"
# The same complaints as upstream's: then it saw the same types.
diff -q "$work/out/violations.report" api/api-rules/violation_exceptions.list

version="-s -w"
for package in vendor/k8s.io/component-base/version vendor/k8s.io/client-go/pkg/version; do
    for pair in gitVersion=v1.20.2 gitMajor=1 gitMinor=20 gitTreeState=clean gitCommit=debian \
        buildDate=1970-01-01T00:00:00Z; do
        version+=" -X k8s.io/kubernetes/$package.$pair"
    done
done
build "$work/out/kube-bed" ./cmd/kube-bed -ldflags "$version"
mv "$work/out/kube-bed" "$bin/.kube-bed"
for name in "${programs[@]:1}"; do
    ln -f "$bin/.kube-bed" "$bin/.$name"
    mv "$bin/.$name" "$bin/$name"
done
rm -f "$bin/.kube-bed"
echo "$sources" >"$bin/.made-by"
echo "made ${programs[*]} in $bin"
