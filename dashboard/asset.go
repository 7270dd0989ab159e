package dashboard

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"net/http"
	"path"
	"time"
)

//go:embed assets
var assetFiles embed.FS

// asset is a file for browsers. Its URL has a part of its hash, so that it can be kept for ever.
type asset struct {
	text []byte
	url  string
}

func readAssets() (map[string]asset, error) {
	found := make(map[string]asset)
	files, err := assetFiles.ReadDir("assets")
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		text, err := assetFiles.ReadFile(path.Join("assets", f.Name()))
		if err != nil {
			return nil, err
		}
		hash := sha256.Sum256(text)
		found[f.Name()] = asset{text, "/assets/" + f.Name() + "?v=" + hex.EncodeToString(hash[:6])}
	}
	return found, nil
}

func (d *Dashboard) asset(w http.ResponseWriter, r *http.Request) {
	a, ok := d.assets[r.PathValue("file")]
	if !ok {
		writeText(w, http.StatusNotFound, "There is no such file.")
		return
	}
	if r.URL.RequestURI() == a.url {
		w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	http.ServeContent(w, r, r.PathValue("file"), time.Time{}, bytes.NewReader(a.text))
}
