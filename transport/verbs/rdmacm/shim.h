// The few calls that package rdmacm makes into librdmacm and libibverbs where those are inline functions,
// macros or unions, or where one call must do the work of many. All return 0 or a negative errno unless
// they say otherwise.
#ifndef FARBLK_SHIM_H
#define FARBLK_SHIM_H

#include <pthread.h>
#include <stdint.h>
#include <rdma/rdma_cma.h>

enum { FARBLK_SGES = 4 };

// A work request with room for its scatter/gather elements. next and sg_list are set once, when allocated.
struct farblk_send { struct ibv_send_wr wr; struct ibv_sge sge[FARBLK_SGES]; };
struct farblk_recv { struct ibv_recv_wr wr; struct ibv_sge sge[1]; };

struct farblk_device {
	char name[64];
	int32_t node_type, link_layer;
	int32_t max_qp_wr, max_sge, max_cqe, max_rd_atom, max_init_rd_atom;
	uint64_t max_mr_size;
};

// A connection event, copied; it is acknowledged when it is here.
struct farblk_event {
	int32_t type, status;
	uint8_t responder_resources, initiator_depth, retry_count, rnr_retry_count, private_len;
	uint8_t private_data[256];
	struct rdma_cm_id *id; // the new connection's, of a connect request
};

struct farblk_params {
	uint8_t responder_resources, initiator_depth, retry_count, rnr_retry_count, private_len;
	uint8_t private_data[256];
};

struct farblk_send *farblk_alloc_sends(int n);
struct farblk_recv *farblk_alloc_recvs(int n);

// Post the first n of the array; *posted says how many the device took.
int farblk_post_send(struct ibv_qp *qp, struct farblk_send *w, int n, int *posted);
int farblk_post_recv(struct ibv_qp *qp, struct farblk_recv *w, int n, int *posted);
// Returns how many completions were written to wc, or a negative number.
int farblk_poll(struct ibv_cq *cq, struct ibv_wc *wc, int n);
int farblk_arm(struct ibv_cq *cq);
int farblk_cq_event(struct ibv_comp_channel *c);

int farblk_describe(struct ibv_context *v, int port, struct farblk_device *d);
int farblk_create_channel(struct rdma_event_channel **ch);
int farblk_next_event(struct rdma_event_channel *ch, struct farblk_event *e);
int farblk_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **id, int ib);
int farblk_set_tos(struct rdma_cm_id *id, uint8_t tos);
int farblk_bind_listen(struct rdma_cm_id *id, void *addr, int backlog);
int farblk_resolve_addr(struct rdma_cm_id *id, void *src, void *dst, int ms);
int farblk_resolve_route(struct rdma_cm_id *id, int ms);
void farblk_addresses(struct rdma_cm_id *id, void *local, void *remote);
int farblk_connect(struct rdma_cm_id *id, struct farblk_params *p);

// rdma_connect in a thread of its own that can be cancelled, because siw connects its TCP socket within the call.
struct farblk_connecting {
	pthread_t thread;
	struct rdma_cm_id *id;
	struct farblk_params params;
	int result;
};
int farblk_connect_start(struct farblk_connecting *c);
// Waits up to ms; returns 1 while the thread runs, else 0, and *result is the call's.
int farblk_connect_join(struct farblk_connecting *c, int ms, int *result);
void farblk_connect_cancel(struct farblk_connecting *c);

int farblk_accept(struct rdma_cm_id *id, struct farblk_params *p);
int farblk_reject(struct rdma_cm_id *id, const void *data, uint8_t len);
int farblk_disconnect(struct rdma_cm_id *id);
int farblk_migrate(struct rdma_cm_id *id, struct rdma_event_channel *ch);
int farblk_destroy_id(struct rdma_cm_id *id);

int farblk_alloc_pd(struct ibv_context *v, struct ibv_pd **pd);
int farblk_reg_mr(struct ibv_pd *pd, uintptr_t addr, uint64_t len, int access, struct ibv_mr **mr);
int farblk_create_cq(struct ibv_context *v, int cqe, struct ibv_comp_channel **c, struct ibv_cq **cq);
int farblk_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_cq *cq, int send, int recv, int sges);
int farblk_qp_error(struct ibv_qp *qp);
int farblk_rnr_timer(struct ibv_qp *qp, uint8_t timer);

#endif
