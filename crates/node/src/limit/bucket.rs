//! [`Buckets`]: the allowances of one source of limits, in integer arithmetic.

use super::rates::Limits;

/// Moments and costs are kept in units of 2⁻³² ns, so that a million operations a second lose nothing by rounding.
const FRACTION_BITS: u32 = 32;
const SECOND: u64 = 1_000_000_000;
/// Requests that passed in haste leave a debt that is paid in this time, in nanoseconds, or that of one request or byte if that takes longer.
const MOST_DEBT_NS: u64 = 100_000_000;

/// What a request costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) writes: bool,
    /// 1; 0 for the rest of a request whose first part has passed.
    pub(super) requests: u64,
    pub(super) bytes: u64,
}

/// One allowance. It is kept as the moment when it is full: taking from it moves the moment away, and time comes nearer to it.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    rate: u64,
    /// How long one unit takes to come, in 2⁻³² ns.
    unit: u64,
    burst_ns: u64,
    /// What comes in the time of the burst; at least 1.
    burst_units: u64,
    /// In 2⁻³² ns.
    full_at: u128,
}

fn fine(ns: u64) -> u128 {
    u128::from(ns) << FRACTION_BITS
}

impl Bucket {
    /// An empty bucket: no allowance, no debt.
    fn new(rate: u64, burst_ns: u64, now_ns: u64) -> Self {
        let unit = (SECOND << FRACTION_BITS) / rate.max(1);
        let burst_units = u128::from(rate) * u128::from(burst_ns) / u128::from(SECOND);
        let burst_units = u64::try_from(burst_units).unwrap_or(u64::MAX).max(1);
        Self { rate, unit, burst_ns, burst_units, full_at: fine(now_ns.saturating_add(burst_ns)) }
    }

    /// From this moment on it is not in debt, and a request may pass.
    fn ready_ns(&self) -> u64 {
        let full_ns = u64::try_from(self.full_at >> FRACTION_BITS).unwrap_or(u64::MAX);
        full_ns.saturating_sub(self.burst_ns)
    }

    fn cost(&self, units: u64) -> u128 {
        u128::from(units) * u128::from(self.unit)
    }

    fn take(&mut self, units: u64, now_ns: u64) {
        self.full_at = self.full_at.max(fine(now_ns)).saturating_add(self.cost(units));
    }

    /// As [`Self::take`], but the debt gets no larger than [`MOST_DEBT_NS`] by this.
    fn take_in_haste(&mut self, units: u64, now_ns: u64) {
        let most = fine(now_ns.saturating_add(self.burst_ns)).saturating_add(fine(MOST_DEBT_NS).max(self.cost(1)));
        let before = self.full_at;
        self.take(units, now_ns);
        self.full_at = self.full_at.min(most.max(before));
    }
}

/// The buckets of one source: for requests and for bytes, each in total, of reads and of writes.
#[derive(Clone, Debug, Default)]
pub(super) struct Buckets {
    limits: Limits,
    requests: [Option<Bucket>; 3],
    bytes: [Option<Bucket>; 3],
}

impl Buckets {
    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// Puts other limits in the place of those before. A limit that stays the same keeps its allowance or debt; any other one
    /// begins anew, without either, so it holds from now on.
    pub(super) fn set(&mut self, limits: Limits, now_ns: u64) {
        let burst_ns = limits.burst_ns();
        let [requests, bytes] = limits.rates();
        let renew = |old: &mut [Option<Bucket>; 3], rates: [Option<u64>; 3]| {
            for (old, rate) in old.iter_mut().zip(rates) {
                let is_same = |bucket: &Bucket| Some(bucket.rate) == rate && bucket.burst_ns == burst_ns;
                if !old.as_ref().is_some_and(is_same) {
                    *old = rate.map(|rate| Bucket::new(rate, burst_ns, now_ns));
                }
            }
        };
        renew(&mut self.requests, requests);
        renew(&mut self.bytes, bytes);
        self.limits = limits;
    }

    /// The buckets that concern a request, each with what it takes from it. One that moves no bytes does not wait for bytes.
    fn concerned(&mut self, cost: Cost) -> impl Iterator<Item = (&mut Bucket, u64)> {
        let requests = meant(&mut self.requests, cost.writes, cost.requests);
        requests.chain(meant(&mut self.bytes, cost.writes, cost.bytes))
    }

    /// The part of a request that may pass at once: no more bytes than come in the time of a burst.
    pub(super) fn part_of(&mut self, cost: Cost) -> Cost {
        let of_bytes = Cost { requests: 0, ..cost };
        let most = self.concerned(of_bytes).map(|(bucket, _)| bucket.burst_units).min().unwrap_or(u64::MAX);
        Cost { bytes: cost.bytes.min(most), ..cost }
    }

    /// From this moment on the request may pass, as far as these limits go; 0 when none concerns it.
    pub(super) fn ready_ns(&mut self, cost: Cost) -> u64 {
        self.concerned(cost).map(|(bucket, _)| bucket.ready_ns()).max().unwrap_or(0)
    }

    /// Takes what the request costs.
    pub(super) fn take(&mut self, cost: Cost, now_ns: u64) {
        self.concerned(cost).for_each(|(bucket, units)| bucket.take(units, now_ns));
    }

    /// Takes what a request costs that passes out of its turn. Others wait for it no longer than for [`MOST_DEBT_NS`]: as much as a device has in
    /// flight when it is reset may be minutes of a rate.
    pub(super) fn take_in_haste(&mut self, cost: Cost, now_ns: u64) {
        self.concerned(cost).for_each(|(bucket, units)| bucket.take_in_haste(units, now_ns));
    }

    /// What part of these limits the request takes: the time in which they let nothing else pass, in 2⁻³² ns.
    pub(super) fn share(&mut self, cost: Cost) -> u128 {
        self.concerned(cost).map(|(bucket, units)| bucket.cost(units)).max().unwrap_or(0)
    }
}

/// The bucket in total and that of reads or writes, each with `units`; none when nothing is taken.
fn meant(buckets: &mut [Option<Bucket>; 3], writes: bool, units: u64) -> impl Iterator<Item = (&mut Bucket, u64)> {
    let [total, of_reads, of_writes] = buckets;
    let own = if writes { of_writes } else { of_reads };
    let meant = [total, own].map(|bucket| bucket.as_mut().filter(|_| units > 0));
    meant.into_iter().flatten().map(move |bucket| (bucket, units))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(limits: Limits) -> Buckets {
        let mut buckets = Buckets::default();
        buckets.set(limits, 0);
        buckets
    }

    /// How many requests pass up to `end_ns`, when each comes as soon as it may pass.
    fn passed(buckets: &mut Buckets, cost: Cost, end_ns: u64) -> u64 {
        let mut now_ns = 0;
        (0..)
            .take_while(|_| {
                now_ns = buckets.ready_ns(cost).max(now_ns);
                buckets.take(cost, now_ns);
                now_ns < end_ns
            })
            .count() as u64
    }

    proptest! {
        #[test]
        fn a_rate_is_kept_whatever_it_is(iops in 1u64..3_000_000, bytes in 0u64..1 << 25) {
            let mut buckets = of(Limits { iops: Some(iops), ..Limits::default() });
            let end_ns = (2000 * SECOND / iops).max(1);
            let passed = passed(&mut buckets, Cost { writes: false, requests: 1, bytes }, end_ns);
            prop_assert!((1990..=2010).contains(&passed), "{passed} of 2000");
        }

        #[test]
        fn no_number_overflows(iops in 1u64..=u64::MAX, bps in 1u64..=u64::MAX, bytes: u64, now_ns: u64) {
            let mut buckets = of(Limits { iops: Some(iops), bps: Some(bps), ..Limits::default() });
            let cost = Cost { writes: true, requests: 1, bytes };
            (0..3).for_each(|_| buckets.take(cost, now_ns));
            let _ = (buckets.ready_ns(cost), buckets.share(cost));
        }
    }

    #[test]
    fn reads_and_writes_have_their_own_limits_and_one_together() {
        let limits = Limits { read_iops: Some(10), write_bps: Some(1000), iops: Some(100), ..Limits::default() };
        let mut buckets = of(limits);
        let [read, write] = [false, true].map(|writes| Cost { writes, requests: 1, bytes: 500 });
        buckets.take(write, 0);
        assert_eq!([buckets.ready_ns(read), buckets.ready_ns(write)], [SECOND / 100, SECOND / 2]);
        buckets.take(read, 0);
        assert_eq!([buckets.ready_ns(read), buckets.ready_ns(write)], [SECOND / 10, SECOND / 2]);
        let discard = Cost { writes: true, requests: 1, bytes: 0 };
        assert_eq!(buckets.ready_ns(discard), SECOND / 50, "a discard waits for bytes, or not for requests");
    }

    #[test]
    fn a_change_begins_anew_and_what_stays_is_kept() {
        let limits = Limits { iops: Some(1), bps: Some(1000), ..Limits::default() };
        let mut buckets = of(limits);
        let cost = Cost { writes: false, requests: 1, bytes: 5000 };
        buckets.take(cost, 0);
        assert_eq!(buckets.ready_ns(cost), 5 * SECOND);
        buckets.set(Limits { bps: Some(2000), ..limits }, 7);
        assert_eq!(buckets.ready_ns(cost), SECOND, "the debt of bytes stayed, or that of requests went");
        buckets.set(Limits { bps: Some(2000), iops: None, ..limits }, 9);
        assert_eq!(buckets.ready_ns(cost), 7);
        buckets.set(Limits::default(), 11);
        assert_eq!((buckets.ready_ns(cost), buckets.share(cost)), (0, 0));
    }
}
