//! The numbers and payloads of vhost-user and virtio-blk. Pure: bytes in, values out.

/// Bytes of a message before its payload: request, flags, size of the payload, 32 bits each.
pub const HEADER_BYTES: usize = 12;
/// The version that every message's flags carry in their two low bits.
pub const VERSION: u32 = 1;
/// Message flag: this is a reply.
pub const FLAG_REPLY: u32 = 1 << 2;
/// Message flag: the sender wants a reply (with REPLY_ACK).
pub const FLAG_NEED_REPLY: u32 = 1 << 3;
/// In the payload of SET_VRING_KICK, SET_VRING_CALL and SET_VRING_ERR: no descriptor is attached.
pub const VRING_NO_FD: u64 = 1 << 8;
/// The flag of a ring's addresses that asks to log writes to its used ring.
pub const VRING_LOG: u32 = 1;
/// The page of the dirty log, in bytes.
pub const LOG_PAGE_BYTES: u64 = 4096;

/// The front end's messages (specification, "Front-end message types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[expect(missing_docs, reason = "the specification's names")]
pub enum Request {
    GetFeatures = 1,
    SetFeatures = 2,
    SetOwner = 3,
    ResetOwner = 4,
    SetMemTable = 5,
    SetLogBase = 6,
    SetLogFd = 7,
    SetVringNum = 8,
    SetVringAddr = 9,
    SetVringBase = 10,
    GetVringBase = 11,
    SetVringKick = 12,
    SetVringCall = 13,
    SetVringErr = 14,
    GetProtocolFeatures = 15,
    SetProtocolFeatures = 16,
    GetQueueNum = 17,
    SetVringEnable = 18,
    SetBackendReqFd = 21,
    GetConfig = 24,
    SetConfig = 25,
    GetInflightFd = 31,
    SetInflightFd = 32,
    ResetDevice = 34,
    GetMaxMemSlots = 36,
    AddMemReg = 37,
    RemMemReg = 38,
    SetStatus = 39,
    GetStatus = 40,
}

/// The back end's request that says its configuration has changed.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;

/// Feature bits of the virtio device.
pub mod feature {
    /// SIZE_MAX is in the configuration.
    pub const BLK_SIZE_MAX: u64 = 1 << 1;
    /// SEG_MAX is in the configuration.
    pub const BLK_SEG_MAX: u64 = 1 << 2;
    /// Writes are refused.
    pub const BLK_RO: u64 = 1 << 5;
    /// The logical block size is in the configuration.
    pub const BLK_BLK_SIZE: u64 = 1 << 6;
    /// FLUSH is served.
    pub const BLK_FLUSH: u64 = 1 << 9;
    /// The topology is in the configuration.
    pub const BLK_TOPOLOGY: u64 = 1 << 10;
    /// The write cache can be switched in the configuration.
    pub const BLK_CONFIG_WCE: u64 = 1 << 11;
    /// The number of queues is in the configuration.
    pub const BLK_MQ: u64 = 1 << 12;
    /// DISCARD is served.
    pub const BLK_DISCARD: u64 = 1 << 13;
    /// WRITE_ZEROES is served.
    pub const BLK_WRITE_ZEROES: u64 = 1 << 14;
    /// Writes to guest memory are logged (vhost).
    pub const LOG_ALL: u64 = 1 << 26;
    /// Indirect descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notifications by index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The vhost-user protocol has features of its own.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Not a legacy device.
    pub const VERSION_1: u64 = 1 << 32;
}

/// Feature bits of the protocol.
pub mod protocol_feature {
    /// GET_QUEUE_NUM.
    pub const MQ: u64 = 1 << 0;
    /// The dirty log lies in shared memory.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// Any message can be acknowledged.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The back end has a channel for requests of its own.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// GET_CONFIG and SET_CONFIG.
    pub const CONFIG: u64 = 1 << 9;
    /// Requests in flight are tracked in shared memory.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// RESET_DEVICE.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// ADD_MEM_REG and REM_MEM_REG.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// GET_STATUS and SET_STATUS.
    pub const STATUS: u64 = 1 << 16;
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The type: a [`Request`], or what the back end asks.
    pub request: u32,
    /// Version and flags.
    pub flags: u32,
    /// Bytes of the payload.
    pub len_bytes: u32,
}

impl Header {
    /// As sent.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        for (out, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip([self.request, self.flags, self.len_bytes]) {
            *out = word.to_ne_bytes();
        }
        bytes
    }

    /// As received.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        let [request, flags, len_bytes] = [0, 4, 8].map(|at| u32_at(bytes, at));
        Self { request, flags, len_bytes }
    }
}

/// A vring and a number: its size, its base, or whether it is enabled.
pub fn vring_state(index: u32, number: u32) -> Vec<u8> {
    [index, number].map(u32::to_ne_bytes).concat()
}

/// Where the parts of a vring are, in user addresses; `log` is a guest address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringAddresses {
    /// The ring.
    pub index: u32,
    /// [`VRING_LOG`] or 0.
    pub flags: u32,
    /// The descriptor table.
    pub descriptors: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub available: u64,
    /// The used ring in guest addresses, for the dirty log.
    pub log: u64,
}

impl VringAddresses {
    /// The payload of SET_VRING_ADDR.
    pub fn to_bytes(self) -> Vec<u8> {
        let mut bytes = vring_state(self.index, self.flags);
        for word in [self.descriptors, self.used, self.available, self.log] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes
    }
}

/// One region of guest memory as the messages describe it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionPayload {
    /// Where it is for the guest.
    pub guest_address: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Where it is in the front end's memory.
    pub user_address: u64,
    /// Where it starts in the file.
    pub file_offset: u64,
}

impl RegionPayload {
    fn words(self) -> [u64; 4] {
        [self.guest_address, self.len_bytes, self.user_address, self.file_offset]
    }

    /// The payload of ADD_MEM_REG and REM_MEM_REG.
    pub fn single(self) -> Vec<u8> {
        let mut bytes = vec![0; 8];
        bytes.extend(self.words().map(u64::to_ne_bytes).concat());
        bytes
    }

    /// The payload of SET_MEM_TABLE.
    pub fn table(regions: &[Self]) -> Vec<u8> {
        let mut bytes = vring_state(regions.len() as u32, 0);
        bytes.extend(regions.iter().flat_map(|region| region.words().map(u64::to_ne_bytes).concat()));
        bytes
    }
}

/// The region of requests in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InflightPayload {
    /// Its length in bytes; 0 in GET_INFLIGHT_FD.
    pub len_bytes: u64,
    /// Where it starts in the file.
    pub file_offset: u64,
    /// Queues.
    pub queues: u16,
    /// Descriptors in each.
    pub queue_size: u16,
}

impl InflightPayload {
    /// The bytes of the payload: QEMU and libvhost-user pad it to a multiple of 8.
    pub const BYTES: usize = 24;

    /// The payload of GET_INFLIGHT_FD and SET_INFLIGHT_FD.
    pub fn to_bytes(self) -> Vec<u8> {
        let mut bytes = [self.len_bytes, self.file_offset].map(u64::to_ne_bytes).concat();
        bytes.extend([self.queues, self.queue_size].map(u16::to_ne_bytes).concat());
        bytes.resize(Self::BYTES, 0);
        bytes
    }

    /// From a reply, padded or not; `None` when it is too short.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < 20 {
            return None;
        }
        let half = |at| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Some(Self {
            len_bytes: u64_at(bytes, 0),
            file_offset: u64_at(bytes, 8),
            queues: half(16),
            queue_size: half(18),
        })
    }
}

/// The payload of GET_CONFIG and SET_CONFIG: `bytes` at `offset` of the configuration.
pub fn config_payload(offset: u32, flags: u32, bytes: &[u8]) -> Vec<u8> {
    let mut payload = [offset, bytes.len() as u32, flags].map(u32::to_ne_bytes).concat();
    payload.extend(bytes);
    payload
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_read_back() {
        let header = Header { request: 5, flags: VERSION | FLAG_NEED_REPLY, len_bytes: 40 };
        assert_eq!(Header::parse(&header.to_bytes()), header);
        assert_eq!(header.to_bytes()[..8], [5, 0, 0, 0, 9, 0, 0, 0]);
    }

    #[test]
    fn payloads_have_the_lengths_of_the_specification() {
        assert_eq!(vring_state(1, 2).len(), 8);
        assert_eq!(VringAddresses::default().to_bytes().len(), 40);
        assert_eq!(RegionPayload::default().single().len(), 40);
        assert_eq!(RegionPayload::table(&[RegionPayload::default(); 3]).len(), 8 + 3 * 32);
        assert_eq!(config_payload(0, 0, &[0; 60]).len(), 72);
    }

    #[test]
    fn inflight_descriptions_read_back_with_and_without_padding() {
        let sent = InflightPayload { len_bytes: 1 << 40, file_offset: 7, queues: 3, queue_size: 256 };
        let bytes = sent.to_bytes();
        assert_eq!(InflightPayload::parse(&bytes), Some(sent));
        assert_eq!(InflightPayload::parse(&bytes[..20]), Some(sent));
        assert_eq!(InflightPayload::parse(&bytes[..19]), None);
    }
}
