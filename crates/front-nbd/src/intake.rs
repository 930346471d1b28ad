//! The intake: receives requests, checks them, admits them.
//!
//! Contract: every request that arrives whole is answered exactly once. When the end of a message cannot be found any
//! more (a wrong magic, a payload that is too long to skip, an end of the stream within a message), the connection
//! ends, after everything in flight has been answered.

use std::rc::Rc;

use spile_core::metrics::now_ns;
use spile_core::{Disk, Error, ErrorKind, MAX_REQUEST_BYTES, Result, Segment, Segments};

use crate::errors::{EINVAL, ENOMEM, EOVERFLOW, EPERM, out_of_range};
use crate::execute::buffers;
use crate::inbound::Inbound;
use crate::session::{Answer, Job, Reply, Session};
use crate::wire::request::{Command, FLAG_DF, REQUEST_BYTES, Request};

/// The payload of a refused write is skipped up to this length, in bytes; a longer one ends the connection.
const MAX_SKIP_BYTES: u32 = 64 << 20;
/// When at least so many bytes of a payload are missing, they are received straight into its buffer. Fewer bytes go
/// through the inbound buffer, together with the requests that follow them.
const DIRECT_BYTES: usize = 16 << 10;

/// Why a request is not performed.
struct Refusal {
    errno: u32,
    message: &'static str,
}

impl Refusal {
    fn new(errno: u32, message: &'static str) -> Result<(), Self> {
        Err(Self { errno, message })
    }
}

/// Takes requests until the client disconnects, hangs up or breaks the protocol, or the server stops.
pub(crate) async fn take_requests<D: Disk>(session: &Rc<Session<D>>, inbound: &mut Inbound) -> Result<()> {
    let mut read_ns = now_ns();
    loop {
        let header = loop {
            if let Some(header) = inbound.take::<REQUEST_BYTES>() {
                break header;
            }
            if !inbound.fill(&session.transport).await? {
                return if inbound.len() == 0 { Ok(()) } else { Err(torn()) };
            }
            read_ns = now_ns();
            session.presence.heard(read_ns);
        };
        let request =
            Request::parse(&header).ok_or_else(|| Error::new(ErrorKind::Protocol, "a request has the wrong magic"))?;
        if request.command == Command::Disconnect || session.stopping() {
            session.said_good_bye.set(request.command == Command::Disconnect);
            return Ok(());
        }
        read_ns = take_one(session, inbound, request, read_ns).await?;
    }
}

/// Admits one request, receives its payload and hands it to a slot. Returns the last time that was read from the clock.
async fn take_one<D: Disk>(
    session: &Rc<Session<D>>,
    inbound: &mut Inbound,
    request: Request,
    mut read_ns: u64,
) -> Result<u64> {
    let checked = check(session, &request);
    let held_bytes = if checked.is_ok() { held_bytes(&request) } else { 0 };
    let mut waited = session.admit(held_bytes).await;
    let room = checked.and_then(|()| payload_room(session, &request));
    let arrived = match &room {
        Ok(payload) => receive_payload(session, inbound, payload, &mut waited).await,
        Err(_) => skip_payload(session, inbound, &request, &mut waited).await,
    };
    arrived.inspect_err(|_| session.withdraw(held_bytes))?;
    if waited {
        read_ns = now_ns();
    }
    match room {
        Ok(payload) => {
            let span = session.begin_span(&request, read_ns);
            session.submit(Job { request, payload, held_bytes, started_ns: read_ns, span });
        }
        Err(Refusal { errno, message }) => {
            let answer = Answer::Failed { errno, message: message.to_owned(), at_start: false };
            session.refuse(Reply { request, answer, held_bytes, started_ns: read_ns, span: None });
        }
    }
    Ok(read_ns)
}

/// The memory a request needs while it is in flight, in bytes.
fn held_bytes(request: &Request) -> u64 {
    match request.command {
        Command::Read | Command::Write => u64::from(request.len_bytes),
        _ => 0,
    }
}

fn check<D: Disk>(session: &Session<D>, request: &Request) -> Result<(), Refusal> {
    let (command, limits) = (request.command, &session.limits);
    if let Command::Unknown(_) = command {
        return Refusal::new(EINVAL, "unknown command");
    }
    let df = request.flags & FLAG_DF != 0;
    if request.flags & !command.valid_flags() != 0 || (df && !session.agreed.structured) {
        return Refusal::new(EINVAL, "a flag that this command does not have");
    }
    if command.writes() && limits.read_only {
        return Refusal::new(EPERM, "the export is read-only");
    }
    let len = u64::from(request.len_bytes);
    match command {
        Command::Flush if request.offset_bytes | len != 0 => {
            return Refusal::new(EINVAL, "a flush has no offset and no length");
        }
        Command::BlockStatus if session.agreed.contexts.is_empty() => {
            return Refusal::new(EINVAL, "no metadata context was selected");
        }
        Command::BlockStatus if len == 0 => {
            return Refusal::new(EINVAL, "block status of no bytes");
        }
        Command::Read if df && len > MAX_REQUEST_BYTES => {
            return Refusal::new(EOVERFLOW, "the read is longer than 32 MiB");
        }
        Command::Read | Command::Write if len > MAX_REQUEST_BYTES => {
            return Refusal::new(EINVAL, "the request is longer than 32 MiB");
        }
        _ => {}
    }
    if request.offset_bytes.checked_add(len).is_none_or(|end| end > limits.size_bytes) {
        return Refusal::new(out_of_range(command), "past the end of the export");
    }
    if (request.offset_bytes | len) & (limits.align_bytes - 1) != 0 {
        return Refusal::new(EINVAL, "not aligned to the minimum block size");
    }
    Ok(())
}

/// The memory into which a request's payload is received.
fn payload_room<D: Disk>(session: &Session<D>, request: &Request) -> Result<Segments, Refusal> {
    buffers(request.payload_bytes() as usize).map_err(|error| {
        session.server.log_failure(session.agreed.export, request, &error);
        Refusal { errno: ENOMEM, message: "out of memory" }
    })
}

async fn receive_payload<D: Disk>(
    session: &Session<D>,
    inbound: &mut Inbound,
    payload: &Segments,
    waited: &mut bool,
) -> Result<()> {
    for segment in payload.iter() {
        let mut done = inbound.move_to(segment);
        while done < segment.len() {
            *waited = true;
            session.holder.receives(true);
            done += receive_part(session, inbound, &segment.slice(done..segment.len())).await?;
            session.presence.heard(now_ns());
        }
    }
    session.holder.receives(false);
    Ok(())
}

async fn receive_part<D: Disk>(session: &Session<D>, inbound: &mut Inbound, part: &Segment) -> Result<usize> {
    if part.len() >= DIRECT_BYTES {
        let n = session.transport.recv_payload(part).await?;
        return if n == 0 { Err(torn()) } else { Ok(n) };
    }
    if !inbound.fill(&session.transport).await? {
        return Err(torn());
    }
    Ok(inbound.move_to(part))
}

async fn skip_payload<D: Disk>(
    session: &Session<D>,
    inbound: &mut Inbound,
    request: &Request,
    waited: &mut bool,
) -> Result<()> {
    let mut left = request.payload_bytes();
    if left > MAX_SKIP_BYTES {
        return Err(Error::new(ErrorKind::Protocol, "a payload is too long to skip"));
    }
    loop {
        let n = inbound.len().min(left as usize);
        inbound.consume(n);
        left -= n as u32;
        if left == 0 {
            return Ok(());
        }
        *waited = true;
        if !inbound.fill(&session.transport).await? {
            return Err(torn());
        }
        session.presence.heard(now_ns());
    }
}

fn torn() -> Error {
    Error::new(ErrorKind::Protocol, "the client hung up within a message")
}
