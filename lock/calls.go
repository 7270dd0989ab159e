package lock

import (
	"strconv"
)

// scriptCall identifies one script call and its repeats. Serials grow with each call of a Locker, and two
// calls that are in progress never share a receipt.
type scriptCall struct {
	receipt receiptKey
	serial  uint64
}

// receiptKey is the name of a key in which Redis keeps the last call and its answer, without a hash
// tag for clusters.
type receiptKey string

// receipts are reused, the last used first.
type receipts struct {
	unused []receiptKey
	made   int
}

// newCall requires mu.
func (l *Locker) newCall() scriptCall {
	return scriptCall{receipt: l.takeReceipt(), serial: l.nextSerial()}
}

// takeReceipt requires mu.
func (l *Locker) takeReceipt() receiptKey {
	r := &l.receipts
	if n := len(r.unused); n > 0 {
		last := r.unused[n-1]
		r.unused = r.unused[:n-1]
		return last
	}
	r.made++
	return receiptKey(l.prefix + ":receipt:" + l.id + ":" + strconv.Itoa(r.made))
}

// nextSerial requires mu.
func (l *Locker) nextSerial() uint64 {
	l.serial++
	return l.serial
}

// ownerName returns an owner name that is unique among all processes.
func (l *Locker) ownerName(serial uint64) string {
	return l.id + ":" + decimal(serial)
}

func decimal(n uint64) string { return strconv.FormatUint(n, 10) }

// releaseCall returns the call that releases locks of a grant. Callers hold mu.
func (l *Locker) releaseCall(g *grant) scriptCall {
	if g.receiptMoved {
		return l.newCall()
	}
	g.receiptMoved = true
	return scriptCall{receipt: g.acquireCall.receipt, serial: l.nextSerial()}
}

// freeReceipt lets other calls use the receipt. Callers hold mu.
func (l *Locker) freeReceipt(c scriptCall) { l.receipts.unused = append(l.receipts.unused, c.receipt) }
