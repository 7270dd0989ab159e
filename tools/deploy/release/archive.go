package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/uuid"
)

// checksums is the file with the SHA-256 of all others, as sha256sum reads it.
const checksums = "SHA256SUMS"

// filesOfArchive are the paths in the repository that an archive has beside the program, sorted: what an installation
// needs, and the pages to which it refers.
func (r *release) filesOfArchive(ctx context.Context) ([]string, error) {
	list, err := r.git(ctx, "ls-files", "--", "LICENSE", "README.md", "CHANGELOG.md", "compose*.yaml", "deploy", "docs")
	if err != nil {
		return nil, err
	}
	files := strings.Split(list, "\n")
	slices.Sort(files)
	return files, nil
}

// writeArchive packs the program and the files into a folder. Order, times, owners and modes are always the same.
func (r *release) writeArchive(to, folder, program string, files []string) (err error) {
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	packed, err := gzip.NewWriterLevel(out, gzip.BestCompression)
	if err != nil {
		return err
	}
	archive := tar.NewWriter(packed)
	if err := r.add(archive, path.Join(folder, "stampede"), program, 0o755); err != nil {
		return err
	}
	for _, file := range files {
		if err := r.add(archive, path.Join(folder, file), filepath.Join(r.root, file), 0o644); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), packed.Close())
}

func (r *release) add(archive *tar.Writer, name, from string, mode int64) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if err := archive.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: name, Size: info.Size(), Mode: mode, ModTime: r.at, Uname: "root", Gname: "root",
	}); err != nil {
		return err
	}
	_, err = io.Copy(archive, in)
	return err
}

func writeChecksums(folder string, names []string) error {
	var lines strings.Builder
	for _, name := range names {
		sum, err := checksum(filepath.Join(folder, name))
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintf(&lines, "%s  %s\n", sum, name) // never fails
	}
	return os.WriteFile(filepath.Join(folder, checksums), []byte(lines.String()), 0o644)
}

func checksum(file string) (string, error) {
	in, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer func() { _ = in.Close() }()
	hash := sha256.New()
	if _, err := io.Copy(hash, in); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

// writeSBOM writes which modules a program is made of, as the go command has recorded them in it (CycloneDX 1.6).
func (r *release) writeSBOM(to, program string) (err error) {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	sum, err := checksum(program)
	if err != nil {
		return err
	}
	bom := cdx.NewBOM()
	bom.SpecVersion, bom.JSONSchema = cdx.SpecVersion1_6, "http://cyclonedx.org/schema/bom-1.6.schema.json"
	// The same program has the same number.
	bom.SerialNumber = uuid.NewSHA1(uuid.NameSpaceOID, []byte(sum)).URN()
	main := cdx.Component{
		BOMRef: "stampede", Type: cdx.ComponentTypeApplication, Name: "stampede", Version: r.version,
		Licenses: &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
		Hashes:   &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: sum}},
	}
	bom.Metadata = &cdx.Metadata{Timestamp: r.at.Format(time.RFC3339), Component: &main}
	// The standard library is a part with faults and versions of its own.
	components := []cdx.Component{module("std", strings.TrimPrefix(info.GoVersion, "go"), "")}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = &debug.Module{Path: m.Replace.Path, Version: m.Replace.Version, Sum: m.Replace.Sum}
		}
		components = append(components, module(m.Path, m.Version, m.Sum))
	}
	refs := make([]string, len(components))
	for i, c := range components {
		refs[i] = c.BOMRef
	}
	bom.Components = &components
	bom.Dependencies = &[]cdx.Dependency{{Ref: main.BOMRef, Dependencies: &refs}}
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	return cdx.NewBOMEncoder(out, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}

// module describes a Go module. Its hash is the one of go.sum, which is made of the hashes of its files.
func module(path, version, sum string) cdx.Component {
	url := fmt.Sprintf("pkg:golang/%s@%s", strings.ToLower(path), strings.ReplaceAll(version, "+", "%2B"))
	c := cdx.Component{BOMRef: url, Type: cdx.ComponentTypeLibrary, Name: path, Version: version, PackageURL: url}
	if raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(sum, "h1:")); err == nil && len(raw) == sha256.Size {
		c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(raw)}}
	}
	return c
}
