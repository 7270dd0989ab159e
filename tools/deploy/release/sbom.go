package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/uuid"
)

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
