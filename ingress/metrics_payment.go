package ingress

import (
	"errors"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
)

// Who reports money.
const (
	reportByShop   = "shop"
	reportByStripe = "stripe"
)

// What becomes of a report. anonymous ones have no token and no signature: a shop that is set up wrongly sends one.
const (
	reportKept         = "kept"
	reportAnonymous    = "anonymous"
	reportUnauthorized = "unauthorized"
	reportForbidden    = "forbidden"
	reportInvalid      = "invalid"
	reportUnavailable  = "unavailable"
)

// reportKey has the labels of a report of money.
type reportKey struct{ by, outcome string }

func (m *metrics) newReports() prometheus.Collector {
	counted := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_payment_reports_total",
		Help: "Reports of money, of the shop or of Stripe, by what became of them: kept, unauthorized (401, or a signature that " +
			"fits no secret), forbidden (403), invalid (other 4xx), unavailable (5xx), and anonymous without a token or a " +
			"signature, as those of strangers are. stampede_payments_total has what became of the money.",
	}, []string{"by", "outcome"})
	for _, by := range []string{reportByShop, reportByStripe} {
		for _, outcome := range []string{
			reportKept, reportAnonymous, reportUnauthorized, reportForbidden, reportInvalid, reportUnavailable,
		} {
			m.reports[reportKey{by, outcome}] = counted.WithLabelValues(by, outcome)
		}
	}
	return counted
}

// countReport counts a report of money that was answered with err. proof is the token or the signature of one that was
// not admitted.
func (m *metrics) countReport(by string, err error, proof string) {
	outcome := reportKept
	if err != nil {
		outcome = refusedReport(err, proof)
	}
	m.reports[reportKey{by, outcome}].Inc()
}

func refusedReport(err error, proof string) string {
	unsigned := errors.Is(err, problemStripeHeader) || errors.Is(err, problemStripeTime) ||
		errors.Is(err, problemStripeSecret)
	switch status := problemFor(err).Status; {
	case status >= http.StatusInternalServerError:
		return reportUnavailable
	case (unsigned || status == http.StatusUnauthorized || status == http.StatusForbidden) && proof == "":
		return reportAnonymous
	case unsigned || status == http.StatusUnauthorized:
		return reportUnauthorized
	case status == http.StatusForbidden:
		return reportForbidden
	}
	return reportInvalid
}
