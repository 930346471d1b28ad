//! Sets up a ring of io_uring, with the features that the kernel has.

use std::io;

use io_uring::IoUring;

/// The size of the submission queue.
pub(crate) const SQ_ENTRIES: u32 = 256;
/// The size of the completion queue: room for every file operation and some thousand sockets. When it is full, the
/// kernel keeps further completions for us.
pub(crate) const CQ_ENTRIES: u32 = 4096;

/// Sets up a ring with as many features as this kernel has: the newest ones are tried first.
pub(crate) fn build_ring() -> io::Result<IoUring> {
    type Tier = fn(&mut io_uring::Builder) -> &mut io_uring::Builder;
    let tiers: [Tier; 4] = [
        |b| b.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all(),
        |b| b.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all(),
        |b| b.setup_submit_all(),
        |b| b,
    ];
    let mut refused = io::Error::from_raw_os_error(libc::ENOSYS);
    for tier in tiers {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(CQ_ENTRIES);
        tier(&mut builder);
        match builder.build(SQ_ENTRIES) {
            Ok(ring) => return Ok(ring),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(error),
        }
    }
    Err(refused)
}

/// Fails where the kernel lacks what the reactor cannot do without.
pub(crate) fn check_features(ring: &IoUring) -> io::Result<()> {
    let params = ring.params();
    if params.is_feature_ext_arg() && params.is_feature_nodrop() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel's io_uring is older than Linux 5.11"))
}
