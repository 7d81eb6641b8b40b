//! Limits on what an agent accepts from its peer. They are checked before anything is allocated.

/// Longest name of a host or VM, in bytes.
pub const NAME_BYTES: usize = 63;

/// Unit in which guest memory is tracked, in bytes.
pub const PAGE_BYTES: u64 = 4096;

/// Unit of ordering, in bytes: all pages of a chunk travel on one stream.
pub const CHUNK_BYTES: u64 = 2 << 20;

/// Pages of a chunk.
pub const CHUNK_PAGES: u64 = CHUNK_BYTES / PAGE_BYTES;

/// Most data streams of one migration.
pub const STREAMS: u16 = 64;

/// Most RAM blocks of one VM.
pub const RAM_BLOCKS: usize = 1024;

/// Longest name of a RAM block, in bytes: QEMU's own limit.
pub const RAM_BLOCK_NAME_BYTES: usize = 255;

/// Largest page size of a RAM block, in bytes: 1 GiB, the largest of x86-64.
pub const HUGE_PAGE_BYTES: u64 = 1 << 30;

/// Longest address (`host:port`), in bytes: a DNS name and a port.
pub const ADDRESS_BYTES: usize = 261;

/// Largest RAM of one VM, in bytes: 64 TiB, beyond what x86-64 hosts carry.
pub const RAM_BYTES: u64 = 64 << 40;

/// Most copied disks of one VM: the index of a block has to fit both them and the RAM blocks.
pub const DISKS: usize = 256;

/// Longest name of a disk, in bytes: that of a block node or a drive.
pub const DISK_NAME_BYTES: usize = 255;

/// Longest disk, in bytes: 2 EiB, so that no chunk or sector number overflows.
pub const DISK_BYTES: u64 = 2 << 60;

/// Most codecs that a destination may name.
pub const CODECS: usize = 16;

/// Longest JSON message, in bytes.
pub const MESSAGE_BYTES: usize = 4 << 20;

/// Longest greeting (`Hello`, `Welcome`), in bytes: read from a peer of which nothing is known yet.
pub const GREETING_BYTES: usize = 16 << 10;

/// Longest piece of device state in one frame, in bytes.
pub const BLOB_BYTES: usize = 1 << 20;

/// Largest device state, in bytes.
pub const DEVICE_STATE_BYTES: u64 = 256 << 20;

/// Longest list of missing pages in post-copy, in bytes: enough for 7 TiB of memory.
pub const MISSING_PAGES_BYTES: u64 = 256 << 20;

/// Longest list of pages that are discarded at once, in bytes: 128 MiB of memory, at most a second of work.
pub const DISCARD_BYTES: u64 = 64 * 72;

/// Most pages in one page request.
pub const REQUESTED_PAGES: usize = 4096;

/// Most pages in one query for templates.
pub const QUERIED_PAGES: usize = 1024;

/// Most templates that a destination advertises. Numbers from here on are those of images that both hosts have.
pub const ADVERTISED_TEMPLATES: u16 = 8;

/// Most images that both hosts have.
pub const SHARED_IMAGES: u16 = 64;

/// Most pages of a template in one message: 64 MiB of content.
pub const TEMPLATE_PAGES: usize = 16384;

/// Most hashes in one message: 8 GiB of memory in chunks.
pub const HASHES: usize = 4096;

/// Most network cards of one VM.
pub const NETWORK_CARDS: usize = 256;

/// Most addresses that a guest may have claimed on one network card.
pub const CLAIMED_ADDRESSES: usize = 256;

/// Longest list of changes to tracked connections, in bytes.
pub const FLOWS_BYTES: u64 = 64 << 20;

/// Most tracked connections that a message names because they could not be installed.
pub const FAILED_FLOWS: usize = 256;

/// Longest text about a tracked connection, in bytes.
pub const FLOW_TEXT_BYTES: usize = 255;

/// Longest data by which a link is measured at once, in bytes.
pub const MEASURED_BYTES: u64 = 64 << 20;

/// Most VLANs of one network card that are probed.
pub const PROBED_VLANS: usize = 32;

/// Most gateways of one network card that are asked.
pub const PROBED_GATEWAYS: usize = 16;

/// Longest id of a controller's command, in bytes.
pub const COMMAND_ID_BYTES: usize = 127;

/// Most commands in a controller's question about what an agent knows.
pub const FLEET_COMMANDS: usize = 16384;

/// Most changes in one report of an agent to its controller.
pub const FLEET_CHANGES: usize = 64;

/// Most names in one list of a report to a controller: peers, features, versions, NUMA nodes.
pub const FLEET_NAMES: usize = 1024;

/// Longest text of a report to a controller, in bytes.
pub const FLEET_TEXT_BYTES: usize = 1024;
