//! The messages of the front end: decodes them from bytes, and encodes replies. It does no I/O and keeps no state.
//!
//! Layouts: QEMU's `docs/interop/vhost-user.rst`, "Message Specification". All numbers are in the byte order of the
//! machine. A message is checked as a whole: its size has to be exact, and so has the number of descriptors with it.

/// The bytes of a message's header: request, flags, size of the payload.
pub const HEADER_BYTES: usize = 12;
/// The largest payload that is accepted, in bytes. The largest messages are SET_MEM_TABLE with 264 and SET_CONFIG with
/// 268.
pub const MAX_PAYLOAD_BYTES: usize = 512;
/// The most descriptors that a message may bring: one for each region of SET_MEM_TABLE.
pub const MAX_FDS: usize = MAX_TABLE_REGIONS;
/// The most regions in SET_MEM_TABLE.
pub const MAX_TABLE_REGIONS: usize = 8;
/// The most bytes of the configuration space that are read or written at once (VHOST_USER_MAX_CONFIG_SIZE).
pub const MAX_CONFIG_BYTES: u32 = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
const NO_FD: u64 = 1 << 8;

/// Bits of the protocol features, as in GET_PROTOCOL_FEATURES and SET_PROTOCOL_FEATURES.
pub mod protocol {
    /// There may be several queues (MQ).
    pub const MQ: u64 = 1 << 0;
    /// The log of dirty pages comes as a descriptor (LOG_SHMFD).
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// Any message may ask for an acknowledgement (REPLY_ACK).
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The back end may send requests to the front end (BACKEND_REQ).
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The back end has the configuration space (CONFIG).
    pub const CONFIG: u64 = 1 << 9;
    /// Requests in flight are noted in shared memory (INFLIGHT_SHMFD).
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// The device can be reset by a message (RESET_DEVICE).
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Memory regions are added and removed one by one (CONFIGURE_MEM_SLOTS).
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// In which way a message breaks the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalid(pub &'static str);

/// The start of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The number of the request.
    pub request: u32,
    flags: u32,
    /// The bytes of payload that follow.
    pub size: u32,
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// For another version, a reply, or a payload that is too long.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Invalid> {
        let mut reader = Reader(bytes);
        let header = Self { request: reader.u32()?, flags: reader.u32()?, size: reader.u32()? };
        match header {
            _ if header.flags & VERSION_MASK != VERSION => Err(Invalid("the message is not of version 1")),
            _ if header.flags & REPLY != 0 => Err(Invalid("a reply where a request was due")),
            _ if header.size as usize > MAX_PAYLOAD_BYTES => Err(Invalid("the payload is too long")),
            header => Ok(header),
        }
    }

    /// True when the front end waits for an answer (once REPLY_ACK is agreed).
    pub fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// Encodes the reply to this message, with its header.
    pub fn reply(&self, payload: &[u8]) -> Vec<u8> {
        encode(self.request, VERSION | REPLY, payload)
    }
}

/// A request from the back end to the front end: the configuration has changed (VHOST_USER_BACKEND_CONFIG_CHANGE_MSG).
pub fn config_changed() -> Vec<u8> {
    encode(2, VERSION, &[])
}

fn encode(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let numbers = [request, flags, payload.len() as u32];
    let mut message: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    message.extend_from_slice(payload);
    message
}

/// A region of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RegionInfo {
    /// Its address as the guest sees it.
    pub guest_addr: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Its address as the front end sees it. Addresses of rings are given in this way.
    pub user_addr: u64,
    /// Its offset in its file, in bytes.
    pub file_offset_bytes: u64,
}

/// The addresses of the parts of a ring, as the front end sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VringAddr {
    /// Writes to the used ring are logged (VHOST_VRING_F_LOG).
    pub is_logged: bool,
    /// The descriptor table.
    pub descriptors: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub available: u64,
    /// The address under which the log of dirty pages knows the used ring.
    pub log: u64,
}

/// The region in which requests in flight are noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InflightInfo {
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Its offset in its file, in bytes.
    pub file_offset_bytes: u64,
    /// How many queues it has room for.
    pub queues: u16,
    /// The number of descriptors of each queue.
    pub queue_size: u16,
}

impl InflightInfo {
    /// Encodes it as a payload of `len` bytes. QEMU pads the structure to the alignment of its 64-bit numbers, other
    /// front ends do not, and each expects its own length.
    pub fn encode(&self, len: usize) -> Vec<u8> {
        let mut bytes = self.len_bytes.to_ne_bytes().to_vec();
        bytes.extend(self.file_offset_bytes.to_ne_bytes());
        bytes.extend(self.queues.to_ne_bytes());
        bytes.extend(self.queue_size.to_ne_bytes());
        bytes.resize(len, 0);
        bytes
    }
}

/// A request of the front end, by the name that the specification gives it.
#[expect(missing_docs, reason = "the specification says what each is")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    SetOwner,
    ResetOwner,
    ResetDevice,
    SetMemTable(Vec<RegionInfo>),
    AddMemReg(RegionInfo),
    RemMemReg(RegionInfo),
    GetMaxMemSlots,
    SetLogBase { len_bytes: u64, file_offset_bytes: u64 },
    SetLogFd,
    SetVringNum { index: u32, num: u32 },
    SetVringAddr { index: u32, addr: VringAddr },
    SetVringBase { index: u32, base: u32 },
    GetVringBase { index: u32 },
    SetVringKick { index: u8 },
    SetVringCall { index: u8 },
    SetVringErr { index: u8 },
    SetVringEnable { index: u32, enable: bool },
    GetQueueNum,
    SetBackendReqFd,
    GetConfig { offset: u32, len: u32, flags: u32 },
    SetConfig { offset: u32, bytes: Vec<u8> },
    GetInflightFd { info: InflightInfo, len: usize },
    SetInflightFd(InflightInfo),
}

/// The number of descriptors that belong to a message.
enum Fds {
    Exactly(usize),
    AtMost(usize),
}

impl Message {
    /// Reads the payload of a message that came with `fds` descriptors.
    ///
    /// # Errors
    /// When the request is unknown, the payload has not exactly the size of its kind, a count is out of range, or
    /// descriptors are missing or too many.
    pub fn parse(header: &Header, payload: &[u8], fds: usize) -> Result<Self, Invalid> {
        let mut reader = Reader(payload);
        let (message, wanted) = Self::read(header.request, &mut reader)?;
        if !reader.0.is_empty() {
            return Err(Invalid("the payload is longer than its request allows"));
        }
        match wanted {
            Fds::Exactly(count) if fds != count => Err(Invalid("descriptors are missing, or too many came")),
            Fds::AtMost(count) if fds > count => Err(Invalid("too many descriptors came")),
            _ => Ok(message),
        }
    }

    /// True when the message is a question: its answer carries what was asked for, and cannot be an acknowledgement.
    pub fn is_question(&self) -> bool {
        use Message::*;
        matches!(self, GetFeatures | GetProtocolFeatures | GetQueueNum | GetMaxMemSlots)
            || matches!(self, GetConfig { .. } | GetVringBase { .. } | GetInflightFd { .. })
    }

    fn read(request: u32, reader: &mut Reader<'_>) -> Result<(Self, Fds), Invalid> {
        let message = match request {
            1 => Self::GetFeatures,
            2 => Self::SetFeatures(reader.u64()?),
            3 => Self::SetOwner,
            4 => Self::ResetOwner,
            8 => Self::SetVringNum { index: reader.u32()?, num: reader.u32()? },
            9 => reader.vring_addr()?,
            10 => Self::SetVringBase { index: reader.u32()?, base: reader.u32()? },
            11 => {
                let index = reader.u32()?;
                reader.u32()?;
                Self::GetVringBase { index }
            }
            15 => Self::GetProtocolFeatures,
            16 => Self::SetProtocolFeatures(reader.u64()?),
            17 => Self::GetQueueNum,
            18 => reader.enable()?,
            24 | 25 => reader.config(request == 25)?,
            31 => {
                let len = reader.0.len();
                Self::GetInflightFd { info: reader.inflight()?, len }
            }
            34 => Self::ResetDevice,
            36 => Self::GetMaxMemSlots,
            _ => return Self::read_with_fds(request, reader),
        };
        Ok((message, Fds::Exactly(0)))
    }

    fn read_with_fds(request: u32, reader: &mut Reader<'_>) -> Result<(Self, Fds), Invalid> {
        let one = Fds::Exactly(1);
        Ok(match request {
            5 => {
                let regions = reader.regions()?;
                let count = regions.len();
                (Self::SetMemTable(regions), Fds::Exactly(count))
            }
            6 => (Self::SetLogBase { len_bytes: reader.u64()?, file_offset_bytes: reader.u64()? }, one),
            7 => (Self::SetLogFd, one),
            12 => reader.vring_fd(|index| Self::SetVringKick { index })?,
            13 => reader.vring_fd(|index| Self::SetVringCall { index })?,
            14 => reader.vring_fd(|index| Self::SetVringErr { index })?,
            21 => (Self::SetBackendReqFd, one),
            32 => (Self::SetInflightFd(reader.inflight()?), one),
            37 => (Self::AddMemReg(reader.single_region()?), one),
            // Some front ends send a descriptor here. It is closed unused, as the specification asks.
            38 => (Self::RemMemReg(reader.single_region()?), Fds::AtMost(1)),
            _ => return Err(Invalid("the request is unknown")),
        })
    }
}

/// True when a part of the configuration space lies within it.
pub fn config_fits(offset: u32, len: u32) -> bool {
    len <= MAX_CONFIG_BYTES && offset <= MAX_CONFIG_BYTES - len
}

/// Reads numbers from the start of a payload, one after the other.
struct Reader<'a>(&'a [u8]);

const SHORT: Invalid = Invalid("the payload is shorter than its request needs");

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Invalid> {
        let (array, rest) = self.0.split_first_chunk().ok_or(SHORT)?;
        self.0 = rest;
        Ok(*array)
    }

    fn u16(&mut self) -> Result<u16, Invalid> {
        self.array().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Result<u32, Invalid> {
        self.array().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Result<u64, Invalid> {
        self.array().map(u64::from_ne_bytes)
    }

    fn vring_addr(&mut self) -> Result<Message, Invalid> {
        let (index, flags) = (self.u32()?, self.u32()?);
        let (descriptors, used) = (self.u64()?, self.u64()?);
        let (available, log) = (self.u64()?, self.u64()?);
        let addr = VringAddr { is_logged: flags & 1 != 0, descriptors, used, available, log };
        Ok(Message::SetVringAddr { index, addr })
    }

    fn vring_fd(&mut self, make: fn(u8) -> Message) -> Result<(Message, Fds), Invalid> {
        let value = self.u64()?;
        let fds = Fds::Exactly(usize::from(value & NO_FD == 0));
        Ok((make(value as u8), fds))
    }

    fn enable(&mut self) -> Result<Message, Invalid> {
        match (self.u32()?, self.u32()?) {
            (index, num @ (0 | 1)) => Ok(Message::SetVringEnable { index, enable: num == 1 }),
            _ => Err(Invalid("a ring can be enabled (1) or disabled (0) only")),
        }
    }

    fn config(&mut self, is_set: bool) -> Result<Message, Invalid> {
        let (offset, len, flags) = (self.u32()?, self.u32()?, self.u32()?);
        let bytes = std::mem::take(&mut self.0);
        if bytes.len() != len as usize {
            return Err(Invalid("the part of the configuration space does not fit the payload"));
        }
        match is_set {
            // A question that goes beyond the space has an answer.
            false => Ok(Message::GetConfig { offset, len, flags }),
            true if config_fits(offset, len) => Ok(Message::SetConfig { offset, bytes: bytes.to_vec() }),
            true => Err(Invalid("the part of the configuration space is not in the space")),
        }
    }

    fn inflight(&mut self) -> Result<InflightInfo, Invalid> {
        let (len_bytes, file_offset_bytes) = (self.u64()?, self.u64()?);
        let info = InflightInfo { len_bytes, file_offset_bytes, queues: self.u16()?, queue_size: self.u16()? };
        if self.0.len() == 4 {
            self.u32()?;
        }
        Ok(info)
    }

    fn region(&mut self) -> Result<RegionInfo, Invalid> {
        let (guest_addr, len_bytes) = (self.u64()?, self.u64()?);
        Ok(RegionInfo { guest_addr, len_bytes, user_addr: self.u64()?, file_offset_bytes: self.u64()? })
    }

    fn single_region(&mut self) -> Result<RegionInfo, Invalid> {
        self.u64()?;
        self.region()
    }

    fn regions(&mut self) -> Result<Vec<RegionInfo>, Invalid> {
        let count = self.u32()? as usize;
        self.u32()?;
        if count > MAX_TABLE_REGIONS {
            return Err(Invalid("more than 8 memory regions"));
        }
        (0..count).map(|_| self.region()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(request: u32, size: usize) -> Header {
        let bytes = encode(request, VERSION | NEED_REPLY, &vec![0; size]);
        Header::parse(bytes[..HEADER_BYTES].try_into().unwrap()).unwrap()
    }

    fn numbers(numbers: &[u64]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
    }

    fn parse(request: u32, payload: &[u8], fds: usize) -> Result<Message, Invalid> {
        Message::parse(&header(request, payload.len()), payload, fds)
    }

    #[test]
    fn headers_are_checked() {
        let with_flags = |flags: u32, size: u32| {
            let numbers = [1, flags, size];
            let bytes: Vec<u8> = numbers.iter().flat_map(|n: &u32| n.to_ne_bytes()).collect();
            Header::parse(bytes[..].try_into().unwrap())
        };
        assert!(with_flags(1, 0).is_ok_and(|header| !header.needs_reply()));
        assert!(with_flags(9, 512).is_ok_and(|header| header.needs_reply()));
        for (flags, size) in [(0, 0), (2, 0), (5, 0), (1, 513), (1, u32::MAX)] {
            assert!(with_flags(flags, size).is_err(), "{flags} {size}");
        }
    }

    #[test]
    fn a_message_has_its_size_to_the_byte() {
        assert_eq!(parse(2, &numbers(&[7]), 0), Ok(Message::SetFeatures(7)));
        assert!(parse(2, &numbers(&[7])[..7], 0).is_err());
        assert!(parse(2, &numbers(&[7, 7]), 0).is_err());
        assert!(parse(1, &[0], 0).is_err());
    }

    #[test]
    fn descriptors_come_where_they_are_due_and_nowhere_else() {
        assert!(parse(1, &[], 1).is_err());
        assert_eq!(parse(12, &numbers(&[3]), 1), Ok(Message::SetVringKick { index: 3 }));
        assert!(parse(12, &numbers(&[3]), 0).is_err());
        assert_eq!(parse(13, &numbers(&[3 | NO_FD]), 0), Ok(Message::SetVringCall { index: 3 }));
        assert!(parse(13, &numbers(&[3 | NO_FD]), 1).is_err());
        let region = numbers(&[0, 1 << 20, 4096, 1 << 30, 0]);
        assert!(parse(37, &region, 1).is_ok() && parse(37, &region, 0).is_err() && parse(37, &region, 2).is_err());
        assert!(parse(38, &region, 0).is_ok() && parse(38, &region, 1).is_ok());
        let table = numbers(&[2, 0, 4096, 1 << 30, 0, 4096, 4096, 1 << 31, 0]);
        assert!(parse(5, &table, 2).is_ok() && parse(5, &table, 1).is_err());
    }

    #[test]
    fn counts_are_bounded() {
        assert!(parse(5, &numbers(&[9, 0]), 0).is_err());
        assert!(parse(5, &numbers(&[u64::from(u32::MAX)]), 0).is_err());
        let config = |request: u32, offset: u32, len: u32, bytes: usize| {
            let mut payload: Vec<u8> = [offset, len, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
            payload.resize(12 + bytes, 0);
            parse(request, &payload, 0)
        };
        assert_eq!(config(24, 0, 60, 60), Ok(Message::GetConfig { offset: 0, len: 60, flags: 0 }));
        assert!(config(24, 0, 60, 59).is_err() && config(24, 250, 7, 7).is_ok());
        assert!(config(25, 0, 257, 257).is_err() && config(25, 250, 7, 7).is_err());
        assert!(config(25, u32::MAX, 1, 1).is_err() && config(25, 255, 1, 1).is_ok());
    }

    #[test]
    fn an_inflight_description_may_be_padded() {
        let info = InflightInfo { len_bytes: 8192, file_offset_bytes: 0, queues: 2, queue_size: 128 };
        let mut bytes = info.encode(20);
        assert_eq!(parse(31, &bytes, 0), Ok(Message::GetInflightFd { info, len: 20 }));
        bytes = info.encode(24);
        assert_eq!(parse(32, &bytes, 1), Ok(Message::SetInflightFd(info)));
        bytes.push(0);
        assert!(parse(32, &bytes, 1).is_err());
    }

    proptest! {
        #[test]
        fn no_payload_breaks_the_reader(request in 0u32..64, payload in prop::collection::vec(any::<u8>(), 0..512), fds in 0usize..9) {
            let _ = parse(request, &payload, fds);
        }
    }
}
