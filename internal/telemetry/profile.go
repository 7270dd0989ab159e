package telemetry

import (
	"net/http"
	"net/http/pprof"
)

// Profiles adds the profiles of the Go runtime below /debug/pprof/, for go tool pprof. The command line is left out: it
// may hold secrets.
func Profiles(mux *http.ServeMux) {
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
}
