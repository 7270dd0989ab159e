package connect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"time"
)

// tlsDialer returns a dialer for servers that name each other. A server needs a certificate for the host under which
// it was named, or for one of the hosts in the URL: clusters may name their nodes by addresses that no certificate has.
func tlsDialer(
	urlAddrs []string, timeout time.Duration,
) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		hosts := make([]string, 0, 1+len(urlAddrs))
		for _, a := range append([]string{addr}, urlAddrs...) {
			host, _, err := net.SplitHostPort(a)
			if err != nil {
				return nil, err
			}
			hosts = append(hosts, host)
		}
		dialer := tls.Dialer{NetDialer: &net.Dialer{Timeout: timeout}, Config: &tls.Config{
			MinVersion: tls.VersionTLS12, ServerName: hosts[0],
			// VerifyConnection replaces the verification, which takes one name only.
			InsecureSkipVerify: true, //nolint:gosec // see above
			VerifyConnection:   func(state tls.ConnectionState) error { return verifyAnyHost(state, hosts) },
		}}
		return dialer.DialContext(ctx, network, addr)
	}
}

// verifyAnyHost returns nil if the server has a trusted certificate for one of the hosts, which are not empty.
func verifyAnyHost(state tls.ConnectionState, hosts []string) (err error) {
	intermediates := x509.NewCertPool()
	for _, certificate := range state.PeerCertificates[1:] {
		intermediates.AddCert(certificate)
	}
	for _, host := range hosts {
		_, err = state.PeerCertificates[0].Verify(x509.VerifyOptions{DNSName: host, Intermediates: intermediates})
		if err == nil {
			return nil
		}
	}
	return err
}
